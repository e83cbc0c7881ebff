"""`python -m tests.fuzz`: hostile bytes for everything that reads what a peer sends.

mutator.py   breaks valid messages where they have their lengths, counts and numbers
messages.py  valid messages of every API and version, to begin with
targets.py   what is fed, and what must hold
producer.py  the producer as a whole, with somebody in the middle who changes bytes
runner.py    worker processes, watched: a hang or a crash is a finding, not the end
report.py    what was fed and reached, of one run or of several
guided.py    the same targets under atheris, which finds its way into the code by itself
corpus/      inputs that once were findings: the tests run each of them
"""
