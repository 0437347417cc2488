"""Models that `triolet serve` knows by name, and how their files come to this machine."""
