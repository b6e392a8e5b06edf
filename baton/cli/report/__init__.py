"""`baton report`: what happened to the requests, from routers or from saved files.

sources  routers (merged) or files → reports as plain data
tables, html (with svg), csv_rows, perfetto, compare   reports → what people and tools read
"""
