"""The console: a page in the browser that shows the state of the scheduler."""
