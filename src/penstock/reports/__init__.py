"""Timeline → terminal, SVG, page, trace: one writer a file. They read a Timeline and nothing else, so that a prediction
and a measured run are drawn alike."""
