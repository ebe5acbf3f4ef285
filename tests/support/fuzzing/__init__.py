"""Fuzzing of everything that reads bytes from outside: targets, and inputs that are almost right.

    target      what a target is, and Hypothesis' strategy for mutations of its seeds
    records     the block record and its codecs
    segments    nvme's segment files, marker and epoch
    small_files fs' ledger, owners' files, epochs and markers
    replies     Redis' replies, and loads of blocks out of them
    answers     S3's answers: heads, errors, marks of epochs
    stack_files the YAML of a stack, and the configuration that comes of it
    traces      request traces
    catalogue   all of them, by name

A target takes bytes and returns; it raises where a promise is broken. `tests/trust/test_fuzz.py` runs them with inputs
of Hypothesis, `tests/trust/fuzz.py` under the coverage guidance of atheris.
"""
