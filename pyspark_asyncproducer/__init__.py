"""What makes `format("asyncproducer")` known to Spark.

Spark imports every module whose name begins with `pyspark_`, and registers its `DefaultSource`.
"""

from asyncproducer.spark.source import DefaultSource

__all__ = ["DefaultSource"]
