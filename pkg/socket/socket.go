// Package socket listens on unix sockets that nobody but our own user (and root) can
// connect to, from their first moment on; or, where the operator has said so, a group.
//
//	ln, err := socket.Listen(ctx, "/run/tunnel/cloud.sock")
//	ln, err := socket.ListenGroup(ctx, "/run/egress/grpc.sock") // of the folder, if that is setgid
//	defer ln.Close() // removes the file
//
// What a process that was killed has left behind is replaced; the socket of one that is
// alive, and a file that is no socket, are errors. Who may connect is decided by the
// file's permissions alone. The package creates no folder: whoever may write there could
// put another socket in the place of ours, so that is for the operator to choose.
//
// On Windows file permissions keep nobody away, so both functions fail there.
package socket

import (
	"context"
	"net"
)

// Listen opens a socket at path. Close removes it.
func Listen(ctx context.Context, path string) (net.Listener, error) { return listenOwn(ctx, path) }

// ListenGroup is Listen, but where the folder has its setgid bit, by which files in it are of
// its group and not of ours (inode(7)), that group may connect, too. Not where somebody else
// may write, as to a volume that Kubernetes has given a group (fsGroup) or to /var/local.
func ListenGroup(ctx context.Context, path string) (net.Listener, error) {
	return listenGroup(ctx, path)
}
