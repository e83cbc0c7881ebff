"""`asyncproducer bench`: this producer beside others, on one real Kafka, in one run.

    workloads.py     what is measured: the table of workloads and their cases
    peers/           who is measured: a module for each foreign library
    loads.py         how a peer is driven: flat out, by many tasks, at a rate
    worker.py        one measurement in a fresh process
    running.py       all of them: topics, rotation, the check by end offsets
    replay.py        the limit: prebuilt Produce requests through a bare socket
    proxy.py         a distance: testing's proxy in a process of its own
    report.py        medians, ratios and losses as Markdown
    plots.py         the same as SVG
    instructions.py  instructions per operation, counted by valgrind

It needs `pip install "asyncproducer[bench]"`. The command's arguments are in cli/bench.py.
"""
