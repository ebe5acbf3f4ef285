"""The verbs of the command `tiered-kv`: one module each, in which `add_arguments` describes the verb and `run` does it.

`main` imports the module of the verb that is asked for, and calls it on the main thread. What must stay true: results
go to standard output and all else to standard error. The exit status says how the verb ended. A mount or server that
hangs does not hold the command. Verbs share the modules `arguments`, `output`, `ask`, `stacks`, `measuring` and
`time_limit`; `report` makes the HTML pages.
"""
