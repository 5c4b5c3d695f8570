"""What is noted of calls, compared between members, and reported."""
