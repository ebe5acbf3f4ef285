"""`tiered-kv schema`: the JSON schema of a stack's file."""

from __future__ import annotations

import argparse

from tiered_kv._cli.arguments import describe_use
from tiered_kv._cli.output import Status, print_json
from tiered_kv.stack_config import stack_schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print the JSON schema of a stack's file, with the settings of every tier type found here. For an editor "
        "with a YAML language server, save it with `tiered-kv schema > stack.schema.json` and begin the stack's file "
        "with `# yaml-language-server: $schema=stack.schema.json`."
    )
    describe_use(parser, ("tiered-kv schema > stack.schema.json", "for an editor to complete and check stack.yaml"))


def run(args: argparse.Namespace) -> Status:
    print_json(stack_schema())  # also without --json
    return Status.OK
