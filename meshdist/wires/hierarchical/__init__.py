"""The wire of groups that span hosts: shared memory inside each host, Gloo between hosts."""
