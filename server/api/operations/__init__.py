"""What operators and pages read: probes, metrics, status, audit, usage."""
