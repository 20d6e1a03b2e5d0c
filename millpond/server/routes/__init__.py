"""One module a group of paths: each makes a router over a ServerContext."""
