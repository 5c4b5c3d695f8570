"""Measuring collectives: ours and the peers', in turn, in one run."""
