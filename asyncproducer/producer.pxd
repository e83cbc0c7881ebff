# Compiled as it is: its coroutines are what users await.
