"""The values of a stack's YAML file; `tiered_kv/config/stack_config.py` makes a checked `StackConfig` of them.

The opening of a stack, the command and the engines' plugins call it, on their own thread, before any tier exists.
What must stay true: a wrong value is a `ConfigError` that names its place in the file, and no message and no text of a
setting shows a secret.

reading          the file, and the variables in it
settings         the base of all models; `TierSettings`, which a tier's author subclasses
units            the types of settings that are sizes, durations or paths
namespace        which blocks are interchangeable
validation       pydantic's errors as a `ConfigError`
hooks            how tiers and their types are found
entries          the entries of `secondary`, each by its tier type
stack_config     the whole file, and its schema
secrets          keeping secrets out of messages; keys of 32 bytes, from a text or a file
"""
