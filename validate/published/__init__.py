"""Judge laws by measurements that others published."""
