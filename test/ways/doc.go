// Package ways breaks a cloud and an edge in every way that an operator may meet, and runs `tunnel check`: the output
// must name the cause and the next step. docs/check.md has the same table.
//
//	go test ./test/ways
//
// Clouds and edges are processes of their own (test/rig). What stands between them, and Kubernetes' API server, are
// servers of the test.
package ways
