"""The needs of every process: time, forks, hosts, memory."""
