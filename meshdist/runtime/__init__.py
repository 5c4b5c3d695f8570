"""What every process needs: time, forks, hosts, memory."""
