"""Plan × micro-batches → Schedule: straight.py, chunked.py, asynchronous.py and auto/; registry.py names them."""
