"""Schedules, profiles, clusters, plans and timelines, and the rules they obey.

Nothing here imports torch or another package of penstock.
"""
