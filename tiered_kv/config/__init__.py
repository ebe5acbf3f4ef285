"""From a stack's YAML file to a checked `StackConfig`.

reading          the file, and the variables in it
stack_config     `load_config`, the model of the whole file, and its JSON schema
settings         the base of all models; `TierSettings`, which a tier's author subclasses
policies         the names of the built-in eviction policies
units            sizes, durations and paths: the types of such settings
namespace        which blocks are interchangeable
validation       what pydantic finds wrong, as a `ConfigError`
redaction        keeping secrets out of messages
secret_keys      keys of 32 bytes, from a text or a file
"""
