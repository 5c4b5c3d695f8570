"""Types that follow values."""
