"""Record calls, compare them between ranks, and report them."""
