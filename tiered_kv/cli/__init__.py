"""The verbs of the command `tiered-kv`: one module each, in which `add_arguments` describes the verb and `run` does it.

`main` imports the module of the verb that is asked for, and calls it on the main thread. What must stay true: results
go to standard output and all else to standard error, the exit status says how it ended, and a mount or server that
hangs does not hold the command. `arguments`, `output`, `ask`, `stacks`, `measuring` and `time_limit` are what verbs
share; `report` makes the HTML pages.
"""
