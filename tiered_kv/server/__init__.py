"""One cache a host: a stack behind a socket, in whose memory all engines of the host keep their blocks."""
