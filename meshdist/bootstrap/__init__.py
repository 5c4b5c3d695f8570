"""Rendezvous: launcher variables, stores, and how ranks find each other."""
