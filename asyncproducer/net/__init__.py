"""Waiting: connections, memory, timers. No Kafka rules and no byte layouts."""
