"""Acknowledged records per second, beside other producers, on real Kafka."""
