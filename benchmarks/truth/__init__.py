"""Predicted against measured: what a profile, a plan and the simulator say of a step, and what two real workers take.

For each model an earlier process has measured its layers, two at once as they will run; another has measured what a
transfer takes between two workers. From these a plan is made for every schedule and its step is predicted. Then two
workers carry the plans out.
"""
