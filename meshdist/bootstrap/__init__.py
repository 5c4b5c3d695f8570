"""Rendezvous: launcher variables, stores, and the exchange by which ranks find each other."""
