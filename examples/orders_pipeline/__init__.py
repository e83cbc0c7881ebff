"""Orders through three stages of Spark, exactly once. See README.md."""
