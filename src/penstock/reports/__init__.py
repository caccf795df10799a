"""Reports of a Timeline: terminal, SVG, HTML page and trace, one writer per file.

Writers read nothing but a Timeline, so that predicted and measured runs are drawn in the same way.
"""
