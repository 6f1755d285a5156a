// Package page shows the status page of a cloud to a real browser, Debian's chromium without a window: with nodes that
// the tests make up, and with a cloud and edges that run as processes.
//
// `make page` installs the browser and runs the tests. `make page-pictures` makes the pictures of docs/page.md. The
// folder is a Go module of its own, so that the tunnel does not depend on the driver of the browser.
package page
