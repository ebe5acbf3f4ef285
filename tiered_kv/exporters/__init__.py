"""What leaves the process for operators and routers: HTTP server, status, reasons of misses, Prometheus, events."""
