"""Records of several sources merged by time: windows, watermark, late records."""
