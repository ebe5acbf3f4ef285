"""The verbs of the command, one module each: `add_arguments` describes it, `run` returns its exit status."""
