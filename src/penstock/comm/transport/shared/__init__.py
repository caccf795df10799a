"""Lanes through memory that two processes of one host share."""
