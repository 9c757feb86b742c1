"""Generated protocol code of Tidegate. Nothing here is written by hand."""
