package auth

import (
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// WriteNodeFile writes a node's certificate, its chain in PEM, and its key into one file
// that its owner alone can read, at once or not at all. A file that is there keeps its
// owner; where the path is a symbolic link, what it leads to is replaced. In a folder of
// another user, which only root can write to, neither is so: that user could have put
// anything there. The file becomes that user's, and a link is replaced itself.
func WriteNodeFile(path string, chainPEM []byte, key crypto.Signer) error {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return fmt.Errorf("encoding the node's key: %w", err)
	}
	keyPEM := encodePEM("PRIVATE KEY", der)
	if _, err = tls.X509KeyPair(chainPEM, keyPEM); err != nil {
		return fmt.Errorf("the node's certificate and key: %w", err)
	}
	path, like, err := followLinks(path)
	if err == nil {
		err = replaceSecret(path, like, append(chainPEM[:len(chainPEM):len(chainPEM)], keyPEM...))
	}
	if err != nil {
		return fmt.Errorf("writing the node's certificate and key: %w", err)
	}
	return nil
}

// maxLinks is how many symbolic links may lead to a file, as in Linux.
const maxLinks = 40

// followLinks returns what is to be replaced at path, and whose it is to be afterwards; nil:
// ours. A link counts if nobody can have made it but we and root.
func followLinks(path string) (to string, like fs.FileInfo, err error) {
	for range maxLinks {
		folder, err := filepath.EvalSymlinks(filepath.Dir(path))
		if err != nil {
			return "", nil, err
		}
		dir, err := os.Lstat(folder)
		if err != nil {
			return "", nil, err
		}
		path = filepath.Join(folder, filepath.Base(path))
		if uid, _, ok := fileOwner(dir); ok && uid != os.Geteuid() && uid != 0 || dir.Mode()&0o002 != 0 {
			if os.Geteuid() != 0 { // who could not give it away
				dir = nil
			}
			return path, dir, nil
		}
		info, err := os.Lstat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return path, nil, nil
		case err != nil:
			return "", nil, err
		case info.Mode()&fs.ModeSymlink == 0:
			return path, info, nil
		}
		next, err := os.Readlink(path)
		if err != nil {
			return "", nil, err
		}
		if !filepath.IsAbs(next) {
			next = filepath.Join(filepath.Dir(path), next)
		}
		path = next
	}
	return "", nil, syscall.ELOOP
}

// replaceSecret writes a file beside path and puts it in its place.
func replaceSecret(path string, like fs.FileInfo, content []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*") // mode 0600
	if err != nil {
		return err
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(f.Name()) //nolint:errcheck // the error that is returned says more
		}
	}()
	if err := sameOwner(f, like); err != nil {
		return err
	}
	if _, err := f.Write(content); err != nil {
		return err
	}
	// A machine that loses its power now must not come back with an empty file.
	if err := f.Sync(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// sameOwner gives f to the owner of like, if there is one.
func sameOwner(f *os.File, like fs.FileInfo) error {
	if like == nil {
		return nil
	}
	uid, gid, ok := fileOwner(like)
	if !ok || uid == os.Geteuid() && (gid == os.Getegid() || like.IsDir()) {
		return nil
	}
	return f.Chown(uid, gid)
}
