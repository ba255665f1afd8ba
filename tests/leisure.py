"""Hypothesis's settings for machines that stand still: what an example, or drawing it, takes is no failure."""

from hypothesis import HealthCheck, settings

AT_LEISURE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # else a stall of 30 s is one
