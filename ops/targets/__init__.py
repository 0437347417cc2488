"""Targets: the places where a fleet can run (this machine, Ray, Kubernetes), and how the number of
its processes is changed there."""
