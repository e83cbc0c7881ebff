# Compiled as it is: it costs something for each request, and no C types are worth their trouble.
