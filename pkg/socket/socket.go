// Package socket listens on unix sockets. From the first moment only our own user (and root) can
// connect; with [ListenGroup] also a group that the operator chose.
//
//	ln, err := socket.Listen(ctx, "/run/tunnel-cloud/admin.sock")
//	ln, err := socket.ListenGroup(ctx, "/run/egress/grpc.sock") // the folder's group, if the folder is setgid
//	defer ln.Close() // removes the file
//
// The socket that a killed process has left behind is replaced. The socket of a live process, or a
// file that is not a socket, is an error. The file's permissions alone decide who may connect. The
// package creates no folder, because the operator must choose it: whoever may write to the folder
// could replace our socket with another one.
//
// On Windows file permissions do not keep other users away, so both functions fail there.
package socket

import (
	"context"
	"net"
)

// Listen opens a socket at path for our own user. Close removes it.
func Listen(ctx context.Context, path string) (net.Listener, error) { return listenOwn(ctx, path) }

// ListenGroup is Listen, and also lets the folder's group connect if the folder has its setgid bit:
// new files in it then belong to the folder's group (inode(7)). It does not if the group or others
// may write to the folder, for example to /var/local or to a volume that Kubernetes gave a group
// (fsGroup).
func ListenGroup(ctx context.Context, path string) (net.Listener, error) {
	return listenGroup(ctx, path)
}
