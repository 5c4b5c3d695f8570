"""How a process finds its world: launchers, stores, rendezvous."""
