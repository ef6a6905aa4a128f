"""An accelerator whose driver tells its temperature by Linux's hwmon alone, made known to mmctl."""
