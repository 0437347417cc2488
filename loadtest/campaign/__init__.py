"""Campaigns against real processes: who asks what, who breaks what, what came of it."""
