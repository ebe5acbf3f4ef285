"""What the process and the machine give: limits, permissions, files, memory, threads, and what interrupts them.

Every package above the interfaces and words uses it, on its own threads. What must stay true: sizes and limits are read
from the kernel and none is assumed, and nothing here knows of blocks or tiers.

limits           what the process and its cgroups may use: memory, descriptors, threads
collapse         huge pages for shared memory, on request
huge_pages       pools of huge pages, and which limit binds
permissions      who may read or write a file
file_systems     what the kernel says of files, and its allocation of space
threads          threads that the system may refuse; calls and background tasks on them
step             the scheduler's step, in which workers pause
interrupts       the call thread, where no signal handler interrupts a call
heap             what Python's collector walks, and what the C library keeps
log_limit        how often a kind of failure is logged
"""
