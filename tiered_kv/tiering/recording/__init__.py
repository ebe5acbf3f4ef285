"""The recorder: it writes which blocks requests asked for, as a trace that `replay` and `simulate` read.

manager.py       shows the recorder each request of a manager, on the manager's thread
recorder.py      a bounded queue, and the thread that empties it
requests.py      the requests that have not ended, and the order in which they are written
trace_file.py    a line for each request, with salted hashes; rotation
"""
