"""Process utilities: deadlines, forks, hosts and memory."""
