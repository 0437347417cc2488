"""Tests of server/slo: counts, burn rates and budgets of the objectives."""
