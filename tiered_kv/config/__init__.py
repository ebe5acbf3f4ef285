"""The values of a stack's YAML file; `stack_config.py` beside this folder makes a checked `StackConfig` of them.

reading          the file, and the variables in it
settings         the base of all models; `TierSettings`, which a tier's author subclasses
units            sizes, durations and paths: the types of such settings
namespace        which blocks are interchangeable
validation       what pydantic finds wrong, as a `ConfigError`
secrets          keeping secrets out of messages; keys of 32 bytes, from a text or a file
"""
