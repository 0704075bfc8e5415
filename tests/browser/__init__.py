"""Tests in a real browser: headless Chromium, driven by Selenium, without a network."""
